"""What enters by a door: each file one feature, none of them known to core."""
