"""Options, a file each: imported where they are asked for, and known to no plain file."""
