"""``python -m megatron_sc.launch``: see :mod:`megatron_sc.training.launch`."""

from .training.launch import main

if __name__ == "__main__":
    main()
