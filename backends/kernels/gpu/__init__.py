"""Machine code for GPUs: one kernel source for both vendors, launch plans, and what runs them.

- `kernel` names kernels, their arguments and tile candidates; the Triton sources stand in `sources/`.
- `build` compiles a variant of a kernel for an architecture, on any machine; `facts` reads what came out.
- `launch` is the launch plan of a slice; `lower` makes it from the slice's module.
- `executor` runs a launch plan on `cupy` (a GPU) or in Triton's interpreter (conformance).
"""
