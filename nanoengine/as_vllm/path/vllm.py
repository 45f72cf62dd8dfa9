"""The `vllm` module that child processes of a program under `nanoengine.as_vllm` import.

`nanoengine.as_vllm.run` adds this folder to PYTHONPATH; it is not imported in other ways.
"""

import sys

from nanoengine.as_vllm import install

del sys.modules[__name__]  # Why: `install` provides the module, which is imported again.
install()
__import__(__name__)
