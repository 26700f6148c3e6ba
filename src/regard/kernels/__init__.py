"""Native kernels: what the C++ library computes, as torch operators."""
