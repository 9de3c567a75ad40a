"""Imported by the fork server alone, which runs no other code of ours: sets up what its workers share.

Nothing else may import this module, the package's `__init__` least of all: the engine that it imports would be imported
from its middle.
"""

import json
import os

from rowmill.executors.base import VARIABLE, open_all

if VARIABLE in os.environ:
    open_all(**json.loads(os.environ.pop(VARIABLE)))
