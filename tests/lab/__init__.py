"""Network namespaces in which vipd meets real packets. Needs root; changes nothing outside of them."""
