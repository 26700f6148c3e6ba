"""Homework: sheets with fresh sizes for a class, a key, and a table of grades."""

from regard.book.homework.class_table import grade_folder
from regard.book.homework.making import make_homework

__all__ = ["grade_folder", "make_homework"]
