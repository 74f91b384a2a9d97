"""A double of CuPy and the CUDA driver: a GPU in host memory whose streams run late."""
