"""Galvatron-BMW: stages and layer strategies; cost estimator, published searches and exact ones."""
