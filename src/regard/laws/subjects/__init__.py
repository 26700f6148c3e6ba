"""Whatever is checked, in the one shape that laws understand."""

from regard.laws.subjects.base import Conventions, Subject
from regard.laws.subjects.layer import Layer
from regard.laws.subjects.model import Images, Model
from regard.laws.subjects.operator import Operator
from regard.laws.subjects.reading import read

__all__ = ["Conventions", "Images", "Layer", "Model", "Operator", "Subject", "read"]
