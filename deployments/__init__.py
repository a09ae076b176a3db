"""All that knows Ray and HTTP: the ingress, the replicas, the controller and how they agree."""
