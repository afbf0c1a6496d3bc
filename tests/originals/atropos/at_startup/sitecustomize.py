"""Python runs this first in the process of a literal run: it puts the stand-ins in, and notes the end."""

import atexit
import json
import os
from pathlib import Path

from tests.originals.atropos.child import note, prepare

job = json.loads(os.environ["STEPWELL_TEST_JOB"])
atexit.register(note, Path(job["folder"]), "ended")
prepare(job)
