"""OSDP: replicated or sharded per operator; cost model, published search and exact ones."""
