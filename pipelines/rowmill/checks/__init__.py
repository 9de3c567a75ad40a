"""The checks: what is measured against which bound, the results, and the gates that they close."""
