"""What the launches of ``cuda-fused`` that give each row a team of threads have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ..integers import ceil_div

ACCESS_BYTES = 16
WARP = 32
# Blocks are compiled for at most so many threads.
BLOCK_SIZES = (128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class TeamPlan:
    """A launch that gives each row a team of threads.

    Attributes:
        rows: Rows of the problem.
        team: Lanes of a warp that share a row; 0: a block or several.
        vectors: Packs (of each input) that a thread holds in registers.
        threads: Threads a block.
        blocks_per_sm: So large blocks that fit on a multiprocessor: what the compiler may spend on registers.
        wide: Elements a pack: 16 bytes of input, or 1.
        overlap: Whether the launch may start before its predecessor in the stream has ended.
        parts: Blocks that share a row.
        streamed: Whether there may be more than the team can hold, which a softmax or a gradient reads again.
    """

    rows: int
    team: int
    vectors: int
    threads: int
    blocks_per_sm: int
    wide: int
    overlap: bool
    parts: int = 1
    streamed: bool = False

    @property
    def grid(self) -> int:
        return ceil_div(self.rows, self.threads // self.team) if self.team else self.rows * self.parts

    def macros(self) -> dict[str, object]:
        return {
            "TEAM": self.team,
            "CLUSTER": self.parts,
            "VECTORS": self.vectors,
            "STREAMED": self.streamed,
            "WIDE": self.wide,
            "THREADS": round_up(self.threads, BLOCK_SIZES),
            "BLOCKS": self.blocks_per_sm,
        }


def round_up(value: int, choices: tuple[int, ...]) -> int:
    """The first choice that is large enough, or the last."""
    return next((choice for choice in choices if choice >= value), choices[-1])


def share_of(packs: int, parts: int) -> int:
    """Packs of a row for each of several blocks: whole lines of 128 bytes."""
    return packs if parts == 1 else ceil_div(packs, parts * 8) * 8
