"""Python runs this first in the process of a literal run: it puts the stand-ins in."""

import json
import os

from tests.originals.atropos.child import prepare

prepare(json.loads(os.environ["STEPWELL_TEST_JOB"]))
