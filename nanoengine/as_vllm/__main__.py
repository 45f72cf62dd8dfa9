"""`python -m nanoengine.as_vllm PROGRAM [ARGS]`."""

import sys

from nanoengine.as_vllm import run

if __name__ == "__main__":
    run(sys.argv[1:])
