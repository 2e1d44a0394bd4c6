"""Layer plans as code of other engines: torch's own words, and jobs of torchtitan."""
