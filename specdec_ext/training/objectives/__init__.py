"""What a head learns: the objective of each kind of head, its loss and its teacher."""
