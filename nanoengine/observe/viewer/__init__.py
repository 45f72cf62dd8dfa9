"""The viewer: one HTML file that shows what a traced run did; docs/viewer.md describes the page.

Recording ── page_data ──► columns: what a step, a sequence, a block did
                               │ gzip, base64
page.html, viewer.css,         ▼
viewer.js, uPlot ── page ──► one file, no network
"""
