"""vipd's accept for its translated flows in chains of the forward hook that belong to other programs."""
