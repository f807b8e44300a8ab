"""A decoder's step on a CPU as one call into C++, compiled for the machine it runs on.

`decoder.cpp` is the step, `gemm.h` the products with int8 weights, `attention.h` attention on the
pages, `team.h` the threads and `simd.h` the vectors. `build.py` compiles and loads them, `pack.py`
lays weights out as they are read, and `program.py` describes a model to them.
"""

from .build import load_library
from .pack import GROUP, PackedWeight, linear_packed_torch, pack_weight
from .program import DecoderProgram, LayerWeights, Sizes

__all__ = [
    "GROUP",
    "DecoderProgram",
    "LayerWeights",
    "PackedWeight",
    "Sizes",
    "linear_packed_torch",
    "load_library",
    "pack_weight",
]
