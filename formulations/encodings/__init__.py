"""Problems in other forms: flat arrays, linear models, usage rows, bucket elimination; Pyomo models as integer rows."""
