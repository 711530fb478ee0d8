"""Rules by which edges mix or draw their operations while a search runs, a file each."""
