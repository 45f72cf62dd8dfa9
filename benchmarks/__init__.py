"""What measures nanoengine; none of it is in the installed package."""
