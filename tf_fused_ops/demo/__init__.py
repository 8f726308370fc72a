"""The demo: real models trained and run, stock and fused, and the claims about them checked."""
