"""SageMaker's one route for all requests, answered by the code of each one's own route."""
