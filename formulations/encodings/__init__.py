"""The canonical problem in other forms: flat arrays, linear models, usage rows, bucket elimination."""
