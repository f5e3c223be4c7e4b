"""Nested containers, flattened and rebuilt. `torch.utils._pytree` is not public; checked on torch 2.11 and 2.13."""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
