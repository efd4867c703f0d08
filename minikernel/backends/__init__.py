"""One file a backend: its declaration and how it runs. Nothing else knows its name."""
