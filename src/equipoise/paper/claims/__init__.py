"""The paper's claims as data, in the order of its sections."""

from .ablations import MEMORY, REMEDIES, WEIGHT
from .judge import Cells, Check, Claim, Judged, Verdict, find_cells, judge, restrict_tables
from .methods import METHOD
from .relaxation import RELAXATION
from .with_memory import HALF, TEN_EQUAL
from .without_memory import NO_MEMORY

__all__ = [
    "CLAIMS",
    "SECTIONS",
    "Cells",
    "Check",
    "Claim",
    "Judged",
    "Verdict",
    "find_cells",
    "judge",
    "restrict_tables",
]

SECTIONS: dict[str, tuple[Claim, ...]] = {
    "The losses, and what they are compared with": METHOD,
    "With memory, half of the classes first": HALF,
    "With memory, ten equal steps": TEN_EQUAL,
    "Without memory": NO_MEMORY,
    "The size of the memory": MEMORY,
    "The weight α of old classes": WEIGHT,
    "The ε of the relaxed loss": RELAXATION,
    "Other remedies": REMEDIES,
}
"""all claims, by what they are about"""
CLAIMS = tuple(claim for claims in SECTIONS.values() for claim in claims)
