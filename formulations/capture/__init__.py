"""CAPTURE: pipelines whose fullest GPU is as empty as possible; the problem, the published search and the exact one."""
