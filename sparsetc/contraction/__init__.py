"""One compiled einsum: from operands as written to steps that run, results, and gradients."""
