"""Evidence for the claims in the documentation: full matrices and measurements, too long for the test suite."""
