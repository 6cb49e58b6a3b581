"""The files of a checkpoint: where they are, and the tensors in them."""
