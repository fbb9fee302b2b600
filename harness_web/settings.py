"""Django settings. Everything that differs between machines comes from `env.py`."""

from __future__ import annotations

import sys

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from harness_web import env as environment

BASE_DIR = environment.BASE_DIR

try:
    ENV = environment.read()
except environment.EnvError as error:
    raise ImproperlyConfigured(str(error)) from error

# --- files ----------------------------------------------------------------------------------------------------------
HARNESS_DATA_DIR = ENV.data_dir
HARNESS_SECRETS_DIR = HARNESS_DATA_DIR / "secrets"
HARNESS_RUN_DIR = HARNESS_DATA_DIR / "run"
HARNESS_SPOOL_DIR = HARNESS_DATA_DIR / "spool"
HARNESS_MODELS_DIR = HARNESS_DATA_DIR / "models"
HARNESS_PROCESS = ENV.process
HARNESS_TRUSTED_PROXIES = ENV.trusted_proxies
HARNESS_ENGINE = ENV.engine
HARNESS_POWER_LOSS = ENV.durability == "power-loss"
HARNESS_USAGE_MONTHS = ENV.usage_months
HARNESS_MODEL = ENV.model

# --- security -------------------------------------------------------------------------------------------------------
try:
    SECRET_KEY = ENV.secret_key or environment.secret_file(HARNESS_SECRETS_DIR / "django-secret-key").hex()
    # Digests of API keys are keyed by a pepper of their own, by version, so that SECRET_KEY can be rotated freely.
    HARNESS_KEY_PEPPERS = {1: environment.secret_file(HARNESS_SECRETS_DIR / "key-pepper-1")}
    # Prefix caches are kept apart by tenant with it.
    HARNESS_CACHE_SALT = environment.secret_file(HARNESS_SECRETS_DIR / "cache-salt")
except OSError as error:
    raise ImproperlyConfigured(
        f"The data directory {HARNESS_DATA_DIR} cannot be used ({error.strerror or error}). "
        "Choose a writable one with --data-dir or HARNESS_DATA_DIR."
    ) from error
DEBUG = ENV.debug
ALLOWED_HOSTS = list(ENV.allowed_hosts)
CSRF_TRUSTED_ORIGINS = list(ENV.csrf_trusted_origins)
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
X_FRAME_OPTIONS = "DENY"
# Pages run no inline script, no inline style and no eval, and load nothing from elsewhere.
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'self'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "connect-src": ["'self'"],
        "object-src": ["'none'"],
        "base-uri": ["'none'"],
        "form-action": ["'self'"],
        "frame-ancestors": ["'none'"],
    }
}
# Two front ends are not ours: the admin evaluates expressions, both style inline. Exceptions end at their addresses.
HARNESS_CSP_EXCEPTIONS = {
    "/admin/": {
        "script-src": ["'self'", "'unsafe-inline'", "'unsafe-eval'"],
        "style-src": ["'self'", "'unsafe-inline'"],
    },
    "/api/docs/": {"style-src": ["'self'", "'unsafe-inline'"]},
}

# --- applications ---------------------------------------------------------------------------------------------------
INSTALLED_APPS = [
    "unfold",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_htmx",
    "allauth",
    "allauth.account",
    "csp",
    "tenants",
    "scheduler",
    "harness_web",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "harness_web.static_files.StaticFilesMiddleware",
    "harness_web.appearance.PagePolicyMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "harness_web.urls"
ASGI_APPLICATION = "harness_web.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "harness_web.appearance.appearance",
            ],
        },
    },
]

# --- database -------------------------------------------------------------------------------------------------------
_database = dj_database_url.parse(ENV.database_url, conn_max_age=0)
if _database["ENGINE"].endswith("sqlite3"):
    # Writers queue instead of failing: take the write lock at BEGIN, wait up to 30 s for it.
    _database["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 30,
        # What the spool takes for stored must survive whatever the spool survives.
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA foreign_keys=ON; "
        f"PRAGMA synchronous={'FULL' if HARNESS_POWER_LOSS else 'NORMAL'};",
    }
    # Tests use a file too: threads see the same database, with the locking of the real one.
    _database["TEST"] = {"NAME": HARNESS_DATA_DIR / "test.sqlite3"}
DATABASES = {"default": _database}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# --- channels and celery --------------------------------------------------------------------------------------------
# Each web process has its own telemetry subscription, so that one box needs no shared layer.
if ENV.redis_url:
    CHANNEL_LAYERS = {
        "default": {"BACKEND": "channels_redis.core.RedisChannelLayer", "CONFIG": {"hosts": [ENV.redis_url]}}
    }
else:
    CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer", "CONFIG": {"capacity": 100}}}
HARNESS_REDIS_URL = ENV.redis_url

# --- language, time, static -----------------------------------------------------------------------------------------
LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("zh-hans", "简体中文")]
LOCALE_PATHS = [BASE_DIR / "harness_web" / "locale"]
USE_I18N = True
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True
WHITENOISE_ALLOW_ALL_ORIGINS = False
WHITENOISE_IMMUTABLE_FILE_TEST = r"^/static/vendor/"  # the version is in the folder's name

# --- accounts -------------------------------------------------------------------------------------------------------
AUTHENTICATION_BACKENDS = [
    "django.contrib.auth.backends.ModelBackend",
    "allauth.account.auth_backends.AuthenticationBackend",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "home"
UNFOLD = {"SITE_TITLE": "Harness", "SITE_HEADER": "Harness"}  # what the administration calls itself
ACCOUNT_LOGOUT_REDIRECT_URL = "account_login"
ACCOUNT_ADAPTER = "harness_web.accounts.ClosedAdapter"
ACCOUNT_LOGIN_METHODS = {"username"}
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*", "password2*"]
ACCOUNT_EMAIL_VERIFICATION = "none"

# --- management API: keys and sessions, the error envelope of /v1, documented without loading anything from afar -----
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "harness_web.api.authentication.KeyAuthentication",
        "harness_web.api.authentication.SessionCaller",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["tenants.api.permissions.IsAdmitted"],
    "DEFAULT_METADATA_CLASS": None,
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["harness_web.api.parsers.StrictJSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "harness_web.api.errors.answer_exception",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Harness management API",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "POSTPROCESSING_HOOKS": ["harness_web.api.schema.document_errors"],
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_AUTHENTICATION": [],
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
}

# --- logging: see harness_web/logs.py -------------------------------------------------------------------------------
LOGGING_CONFIG = "harness_web.logs.configure"
LOGGING = {"level": ENV.log_level, "format": ENV.log_format, "process": ENV.process}
TESTING = "pytest" in sys.modules
