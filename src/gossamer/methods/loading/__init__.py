"""Methods from the user's own files and from installed packages, and what a method must declare."""
