"""What the tests of this folder share lies in it as modules."""
