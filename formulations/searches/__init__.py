"""The searches of the papers, as published, on their own cost models; the exact formulations stand beside them."""
