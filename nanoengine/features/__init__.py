"""Optional features, one module or package each; imported only when they are used."""
