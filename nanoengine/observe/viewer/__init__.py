"""The viewer: one HTML file that shows a traced run; docs/viewer.md describes the page.

Recording ── page_data ──► columns: data per step, sequence and block
                               │ gzip, base64
page.html, viewer.css,         ▼
viewer.js, uPlot ── page ──► one file, no network
"""
