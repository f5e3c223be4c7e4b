"""Reports: a page of what a run did, from a file of its events (docs/report.md).

recorder.py    events, as they happen, to a file of JSON lines (format.py); capture.py: graphs that were compiled
reading.py     a file to a `Run`; from here on neither torch nor the runtime is needed
steps.py, costs.py, verdict.py              what happened when, what it cost by line, what to change first
memory.py, nesting.py, difference.py        a graph: memory over the step, its parts, beside another
page.py        all of that as data in one HTML page: assets/ is its text, vendor/ the libraries in it
session.py     `tarry.report(path)`: a recording that ends in a page; terminal.py: a summary as text
"""
