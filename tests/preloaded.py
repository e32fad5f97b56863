"""What a process of the fixture `forkserver` has imported when it starts."""

import gc

import torch._dynamo  # noqa: F401 - what torch imports when the first optimizer is made

from . import test_loader, test_loader_processes, test_process_group  # noqa: F401

gc.freeze()
