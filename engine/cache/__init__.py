"""The paged KV cache: blocks, block tables, prefix hashes, tensors."""
