"""``python -m minikernel tune``: measure which backend is the fastest where, for auto to go by."""
