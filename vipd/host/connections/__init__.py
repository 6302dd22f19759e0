"""The connections that others make to vipd, over TCP and to the API's socket: one way in for all of them."""
