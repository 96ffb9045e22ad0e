"""What a program would do on hardware that is not here: compile for it, read what the compiler made."""
