"""Speed against ceilings and peers measured in the same run; run by hand."""
