"""Optional features, one file each; imported only when they are used."""
