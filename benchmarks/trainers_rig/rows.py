"""The trainers. A new one is a new file, and a row here."""

from benchmarks.trainers_rig.ours import OURS
from benchmarks.trainers_rig.row import TrainerRow
from benchmarks.trainers_rig.tinker import TINKER
from benchmarks.trainers_rig.trl import TRL
from benchmarks.trainers_rig.verl import VERL

ROWS: tuple[TrainerRow, ...] = (OURS, TRL, VERL, TINKER)
