"""The views, by id, in the order of their digits (kvtop.keys.VIEWS): one module each, on `base`.

overview, segments, tiers, models, processes, events, metrics, doctor: model -> rows of a table and lines around it. Nothing here
knows a terminal.
"""

from kvtop.views import doctor, events, metrics, models, overview, processes, segments, tiers
from kvtop.views.base import View

VIEWS: dict[str, View] = {
    module.VIEW.id: module.VIEW for module in (overview, segments, tiers, models, processes, events, metrics, doctor)
}
"""View id -> view."""
