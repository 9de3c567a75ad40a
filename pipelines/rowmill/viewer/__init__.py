"""`rowmill view`: a local web application in which every number of a report leads to its rows.

    app ─► pages ─► lists, links ─► builds ─► reports, inspection, the views of the statistics
     └── server (uvicorn, the port, the token)

It reads what builds wrote and writes nothing. What a page shows is asked of the functions that `rowmill inspect`,
`trace`, `diff` and `sql` use, so a terminal and a page cannot disagree.
"""
