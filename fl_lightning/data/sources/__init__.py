"""Data sets that are divided: digits, iris, images in files and folders, torchvision."""
