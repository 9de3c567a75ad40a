"""What people look at: console tables, progress, the HTML report, plots."""
