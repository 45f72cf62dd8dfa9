"""What a child process of a program under `nanoengine.as_vllm` finds as `vllm` on its path.

`nanoengine.as_vllm.run` puts this folder into PYTHONPATH; nobody imports it by another way.
"""

import sys

from nanoengine.as_vllm import install

del sys.modules[__name__]  # Why: `install` offers the module, and Python looks for it once more.
install()
__import__(__name__)
